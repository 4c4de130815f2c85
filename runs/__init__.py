"""What every run needs, whatever its algorithm: settings, processes, files, checkpoints, logs. Imports nothing from
records/, hub/ or the programs.

Read in this order: settings.py and cli.py (from the command line to settings), errors.py and console.py (what a user
reads), devices.py and stop.py (processes, and when they end), small_files.py (what is read and trusted), files.py,
tensors.py and shards.py (what is written), checkpoint.py (what a checkpoint holds: a table), folder.py (a run's
folder: its lock, and what is refused), logger.py and metrics.py (rows), optimizer.py (how many steps, at which
learning rate).
"""

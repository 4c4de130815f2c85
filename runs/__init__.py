"""What every run needs, whatever its algorithm. Imports nothing from records/ or the programs.

Read in this order: settings.py (settings, and how they are read), console.py (what a user reads), devices.py
(processes, and when they end), checkpoint.py (a run on disk), logger.py (rows and speed), optimizer.py (how
many steps, at which learning rate).
"""

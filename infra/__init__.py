"""The parts that every run needs, with any algorithm. Imports nothing from the other rooms.

Read in this order: settings.py (the settings), parse.py (from words and files to settings), console.py (the output),
devices.py (processes that compute together: who started them, and their end), checkpoint.py (a run on disk), program.py
(the hash of a program's files), files.py (files that are complete or do not exist), random_numbers.py (seeds,
stochastic rounding), logger.py (rows and speed), trackers.py (wandb and tensorboard), health.py (signs that a run is
sick), optimizer.py (the steps and their learning rates), kernels.py (functions with a backward of our own).
"""

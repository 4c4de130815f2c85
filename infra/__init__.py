"""What every run needs, whatever its algorithm. Imports nothing from the other rooms.

Read in this order: settings.py (what a run can be told), parse.py (how it is told), console.py (what a user reads),
launchers.py (who started the processes), devices.py (processes that compute together, and when they end),
checkpoint.py (a run on disk), program.py (the hash of a program's files), files.py (files that are whole or not there),
seeds.py (random numbers), logger.py (rows and speed), health.py (signs that a run is sick), optimizer.py (how many
steps, at which learning rate), rounding.py (types of numbers, stochastic rounding), kernels.py (functions with a
backward of our own).
"""

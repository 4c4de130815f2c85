"""What every run needs, whatever its algorithm. Imports nothing from the other rooms.

Read in this order: settings.py (what a run can be told), parse.py (how it is told), console.py (what a user reads),
launchers.py (who started the processes), devices.py (processes that compute together, and when they end),
checkpoint.py (a run on disk), files.py (files that are whole or not there), seeds.py (random numbers), logger.py
(rows and speed), optimizer.py (how many steps, at which learning rate), server.py (requests to a server of another
program), rounding.py (types of numbers, stochastic rounding), kernels.py (functions with a backward of our own).
"""

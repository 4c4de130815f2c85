"""What a forker need not open: settings, records, tokens, weights, checkpoints, logs, devices."""

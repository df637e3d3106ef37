"""What every other layer may use: the device, memory, sizes, addresses, hooks."""

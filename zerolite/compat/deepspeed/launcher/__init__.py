"""``deepspeed.launcher``: names that other launchers read. The launcher itself is the command ``zerolite``."""

"""``deepspeed.launcher``: names that other launchers read; the launcher here is ``zerolite``."""

"""``deepspeed.launcher.runner``: name of the file to which `accelerate launch` adds variables for the ranks."""

import os

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

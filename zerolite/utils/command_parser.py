"""Parser of the command lines of zerolite's commands."""

from __future__ import annotations

import argparse


def command_parser(prog: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return a parser that shows its texts as they are written and knows whole names of options alone."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
    )

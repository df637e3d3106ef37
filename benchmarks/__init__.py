"""Benchmarks of zerolite beside the libraries it competes with. Run `python benchmarks/compare.py --help`."""

"""`python -m moepack`: the command line."""

from moepack.cli import main

main()

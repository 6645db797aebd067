"""`python -m sandlot.cli`."""

from sandlot.cli import main

main()

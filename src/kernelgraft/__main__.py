"""`python -m kernelgraft`."""

from kernelgraft.cli import main

main()

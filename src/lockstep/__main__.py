"""`python -m lockstep`."""

from lockstep.cli.entry import main

if __name__ == "__main__":
    main()

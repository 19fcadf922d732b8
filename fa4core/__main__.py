"""`python -m fa4core`: the command line."""

from fa4core.cli import main

if __name__ == "__main__":
    main(prog_name="python -m fa4core")

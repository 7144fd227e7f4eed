"""`python -m kvstore.cli`: the operator's tool without its entry script."""

from kvstore.cli import main

if __name__ == "__main__":
    main(prog_name="kvstore")

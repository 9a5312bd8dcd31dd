"""`python -m toolkit`, which `accelerate launch -m toolkit` calls in every process."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="toolkit")

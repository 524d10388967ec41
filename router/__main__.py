"""``python -m router`` is ``fencepost``."""

from router.cli import main

if __name__ == "__main__":
    main(prog_name="fencepost")

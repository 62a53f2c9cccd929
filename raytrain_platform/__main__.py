"""``python -m raytrain_platform`` is ``raytrain``."""

from raytrain_platform.cli.app import main

if __name__ == "__main__":
    main()

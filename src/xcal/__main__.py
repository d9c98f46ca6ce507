"""`python -m xcal` is `xcal`."""

from xcal.cli.main import main

if __name__ == "__main__":
    main()

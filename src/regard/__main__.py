"""`python -m regard` is the command `regard`."""

from regard_command import main

if __name__ == "__main__":
    main()

"""`python -m trajlake`, the same as `trajlake`."""

from trajlake.cli import main

main()

"""What nsys starts in place of the script.

    python -m perfdoctor.doors.nsys_child --sites NAME.sites.json [options] -- script.py args...

Not for hands: `perfdoctor nsys` writes this line.
"""

from __future__ import annotations

import sys

from perfdoctor.doors.nsys_start import say_begun


def main() -> int:
    """Say that the script begins, then run it."""
    say_begun()  # before torch is imported: what fails from here on is not nsys's
    from perfdoctor.doors.nsys_script import run_inside

    return run_inside(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

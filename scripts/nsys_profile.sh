#!/usr/bin/env bash
# Record a training command with Nsight Systems and print the diagnosis: scripts/nsys_profile.sh python train.py args...
# Options of perfdoctor come first, before `--`: scripts/nsys_profile.sh --active 20 -- python train.py
set -euo pipefail
exec "$(dirname "$0")/perfdoctor" nsys "$@"

"""From a Timeline to a Diagnosis. numpy only: neither torch nor the live hooks are imported here."""

from perfdoctor.diagnose.verdict import CHECKS, diagnose, diagnose_ranks

__all__ = ["CHECKS", "diagnose", "diagnose_ranks"]

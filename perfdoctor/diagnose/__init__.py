"""From a Timeline to a Diagnosis. numpy only: neither torch nor the live hooks are imported here."""

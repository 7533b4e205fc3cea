"""Small scripts that `perfdoctor env` runs, each in a process of its own: one that hangs or crashes is a finding.

They import nothing of perfdoctor. Each prints what it saw as one line and exits with 0 when the tool works, with 77
when there is nothing to try it on; anything else is a failure, told from its standard error by `perfdoctor.cli.causes`.
"""

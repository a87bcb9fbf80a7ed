"""Statistics of every head over a corpus: cut into shards, read by any number of processes, merged
in one order.

`scan(Job(model, texts, folder))` does all of it. The parts can be run by whatever runs jobs: a
`Scanner` makes the file of a shard from its number, and `merge` the tables from all files.
"""

from regard.scanning.corpus import Corpus
from regard.scanning.corpus_scan import merge, scan
from regard.scanning.options import OBSERVED, STATISTICS, Options, observed
from regard.scanning.result_files import view_command
from regard.scanning.scan_table import Extreme, Scan, ScannedHead, Summary
from regard.scanning.scanner import Job, Scanner
from regard.scanning.settings import settle

__all__ = [
    "OBSERVED",
    "STATISTICS",
    "Corpus",
    "Extreme",
    "Job",
    "Options",
    "Scan",
    "ScannedHead",
    "Scanner",
    "Summary",
    "merge",
    "observed",
    "scan",
    "settle",
    "view_command",
]

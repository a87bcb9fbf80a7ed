"""Files on disk: read with care, written whole or not at all, by one writer at a time.

What is in a file is the business of others (see trace_files/ and models/).
"""

from regard.files.claims import claimed, folder_of
from regard.files.paths import expanded, is_folder, is_there
from regard.files.regular_file import opened, read_bytes, read_json, read_text
from regard.files.replacement import replacing
from regard.files.strict_json import finite_or_null

__all__ = [
    "claimed",
    "expanded",
    "finite_or_null",
    "folder_of",
    "is_folder",
    "is_there",
    "opened",
    "read_bytes",
    "read_json",
    "read_text",
    "replacing",
]

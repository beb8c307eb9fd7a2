"""Public data sets as `Record`: one adapter a format, told from the rows, read by number or as a stream."""

from crossfuse.data.formats.base import Format, Reading
from crossfuse.data.formats.dataset import RecordDataset, Rejected
from crossfuse.data.formats.loading import FORMATS, detect_format, load_records

__all__ = ["FORMATS", "Format", "Reading", "RecordDataset", "Rejected", "detect_format", "load_records"]

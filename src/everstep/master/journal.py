"""The master's journal. It lives in ``everstep.storage.journal``: embedded jobs and the readers use it too."""

from everstep.storage.journal import Entry, Journal, Restored, digest_of, read_journal

__all__ = ["Entry", "Journal", "Restored", "digest_of", "read_journal"]

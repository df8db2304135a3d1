"""Reads files of prices: CSV, JSON (both also ``.gz``) or Parquet."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from everstep.errors import ConfigError, escaped
from everstep.monitor.prices import PriceBook, PriceError, parse_prices

PRICES_MAX_BYTES = 256 << 20


def read_prices(path: Path) -> PriceBook:
    """Return the prices of a file: CSV, JSON (both also ``.gz``) or Parquet. Raise ConfigError with one line."""
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as file:
            raw = file.read(PRICES_MAX_BYTES + 1)
        if len(raw) > PRICES_MAX_BYTES:
            raise PriceError(f"larger than {PRICES_MAX_BYTES >> 20} MB")
        return parse_prices(raw.decode())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"prices {str(path)!r}: truncated or damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"prices {str(path)!r}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"prices {str(path)!r}: no text") from None
    except PriceError as error:
        raise ConfigError(f"prices {str(path)!r}: {error}") from None


def _parquet(path: Path) -> PriceBook:
    import pyarrow
    from pyarrow import csv, parquet

    try:
        table = parquet.read_table(path)
        out = pyarrow.BufferOutputStream()
        csv.write_csv(table, out, csv.WriteOptions(quoting_style="needed"))
    except (pyarrow.ArrowException, ValueError) as error:
        raise PriceError(f"no Parquet, or damaged: {escaped(str(error), 200)}") from None
    return parse_prices(out.getvalue().to_pybytes().decode())

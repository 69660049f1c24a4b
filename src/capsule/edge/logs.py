"""One log for all: structlog's and the standard library's messages in one format, on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

from capsule.config import Config


def configure_logging(config: Config) -> None:
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(config.log_format),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    # uvicorn says at `info` what our own lines say already, asyncssh a line per channel.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncssh"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _rendering(format: str) -> list[structlog.typing.Processor]:
    on_terminal = sys.stderr.isatty()
    if format == "json" or (format == "auto" and not on_terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [structlog.dev.ConsoleRenderer(colors=on_terminal)]

"""Runs a Beam pipeline and gives its counters: the one place that knows runners.

`in-process` is Beam's FnApiRunner: DirectRunner would first look for a Prism binary, 0.15 s a run. Epochs are
bounded, so the same pipelines run on any runner taking bounded pipelines.
"""

from collections.abc import Callable, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics.metric import Metrics, MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

from lake.errors import CommitConflictError

NAMESPACE = "trajlake"

Build = Callable[[beam.Pipeline], object]


def count(name: str, value: int) -> None:
    """Add to a counter, from inside a DoFn."""
    Metrics.counter(NAMESPACE, name).inc(value)


class _Options(PipelineOptions):
    """Beam's options, each view made once: Beam asks for some a hundred times a run and parses arguments every time."""

    def view_as(self, cls: type[Any]) -> Any:
        """The options as an instance of `cls`; views share what they hold."""
        views = self.__dict__.setdefault("_views", {})
        if cls not in views:
            views[cls] = super().view_as(cls)
        return views[cls]


def run_beam(build: Build, beam_options: Sequence[str] = ()) -> dict[str, int]:
    """Build and run a pipeline to its end.

    Args:
        build: Applies transforms to the pipeline.
        beam_options: Beam's own options; without `--runner` it runs in process.

    Returns:
        The counters of `count`, by name; `{"conflicts": 1}` when another process committed first.
    """
    options = _Options(list(beam_options))
    in_process = not any(option.startswith("--runner") for option in beam_options)
    pipeline = beam.Pipeline(runner=FnApiRunner() if in_process else None, options=options)
    build(pipeline)
    try:
        result = pipeline.run()
        result.wait_until_finish()
    except Exception as error:
        # Runners wrap what a DoFn raised in their own errors; only its name is sure to come through.
        if CommitConflictError.__name__ in f"{type(error).__name__} {error}":
            return {"conflicts": 1}
        raise
    finally:
        # Arrow keeps freed memory for later; over many epochs that is a hundred megabytes more at the peak.
        pa.default_memory_pool().release_unused()
    counters = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))["counters"]
    return {counter.key.metric.name: int(counter.result) for counter in counters}

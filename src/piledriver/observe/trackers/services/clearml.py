"""ClearML tasks."""

from __future__ import annotations

from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, import_service


class ClearMLTracker(GeneralTracker):
    """A task of the project `run_name`, or the task that runs already; further arguments go to `Task.init`."""

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._ours = False

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    def start(self) -> None:
        """Use the current task, or start one."""
        task_class = import_service("clearml").Task
        self.task = task_class.current_task()
        if self.task is None:
            self._ours = True
            names = {"project_name": self.run_name, "task_name": self.run_name}
            self.task = task_class.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as the configuration of the task."""
        self.task.connect_configuration(dict(values))

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars; without a step as single values."""
        logger = self.task.get_logger()
        for key, value in values.items():
            if not isinstance(value, int | float):
                continue
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log images by name."""
        for key, image in values.items():
            title, series = _title_and_series(key)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table from columns and data, or from a data frame."""
        table = dataframe if dataframe is not None else ([columns] if columns else []) + list(data or [])
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        """Close the task, if it was started here."""
        if self.task is not None and self._ours:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """Return the chart and series of a name: `eval_loss` is the series `eval` of `loss`; the default is `train`."""
    for prefix in ("eval", "test", "train"):
        if name.startswith(f"{prefix}_"):
            return name.removeprefix(f"{prefix}_"), prefix
    return name, "train"

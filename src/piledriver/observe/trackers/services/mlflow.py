"""MLflow; `tracking_uri` chooses a server, a database or a folder, else MLflow's own settings do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, import_service, numbers_only


class MLflowTracker(GeneralTracker):
    """One run of an experiment.

    MLflow's active run belongs to a thread. Every call here names its run instead; `attach` makes it the active one of
    the thread that trains as well, for code there that calls `mlflow` itself.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self.run_id = run_id
        self.tags = tags
        self.nested_run = nested_run
        self.run_name = run_name
        self.description = description
        self.tracking_uri = tracking_uri
        self.active_run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.active_run

    def start(self) -> None:
        """Find or create the experiment, and start the run."""
        mlflow = _mlflow()
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        name = self.experiment_name or "Default"
        found = mlflow.get_experiment_by_name(name)
        folder = None if self.logging_dir is None else os.fspath(self.logging_dir)
        experiment = mlflow.create_experiment(name, artifact_location=folder) if found is None else found.experiment_id
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=None if self.tags is None else dict(self.tags),
            description=self.description,
        )
        self.run_id = self.active_run.info.run_id

    def attach(self) -> None:
        """Make the run the active one of the calling thread too."""
        mlflow = _mlflow()
        current = mlflow.active_run()
        if current is None or current.info.run_id != self.run_id:
            mlflow.start_run(run_id=self.run_id, nested=current is not None)

    def detach(self) -> None:
        """End the active run of the calling thread, if it is this one."""
        mlflow = _mlflow()
        current = mlflow.active_run()
        if current is not None and current.info.run_id == self.run_id:
            mlflow.end_run()

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as parameters, in batches of MLflow's limit; values longer than it allows are omitted."""
        mlflow = _mlflow()
        limits = mlflow.utils.validation
        kept = [(key, value) for key, value in values.items() if len(str(value)) <= limits.MAX_PARAM_VAL_LENGTH]
        size = limits.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(kept), size):
            mlflow.log_params(dict(kept[start : start + size]), run_id=self.run_id)

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log the numeric values."""
        _mlflow().log_metrics(numbers_only(values), step=step, run_id=self.run_id, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib or plotly figure as an artifact."""
        _mlflow().MlflowClient().log_figure(self.run_id, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        _mlflow().log_artifact(local_path, artifact_path=artifact_path, run_id=self.run_id)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log a folder."""
        _mlflow().log_artifacts(local_dir, artifact_path=artifact_path, run_id=self.run_id)

    def finish(self) -> None:
        """End the run."""
        if self.run_id is not None:
            mlflow = _mlflow()
            mlflow.MlflowClient().set_terminated(self.run_id)
            self.detach()


def _mlflow() -> Any:
    mlflow = import_service("mlflow")
    import_service("mlflow.utils.validation")
    return mlflow

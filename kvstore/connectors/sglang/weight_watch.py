"""Notices when SGLang changes the weights of this process while it runs.

SGLang does not tell a storage backend about it: an update calls methods of the model runner, and
the flush after it empties SGLang's own caches only. So these methods are wrapped. An update is
noted before it begins; one that fails half-way counts too. `weight_version` is compared as well.

The state is the process's, as the weights are (docs/decisions/0022-sglang-weight-updates.md).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

WATCHED: Final = (
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "WeightUpdater",
        (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "load_weights_from_distributed",
            "begin_weight_update",
        ),
    ),
    (
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        ("release_memory_occupation",),
    ),
)
"""(module, class, methods) after whose call the weights may be others."""
RELEASE: Final = "release_memory_occupation"
WEIGHTS_TAG: Final = "weights"
MODULE: Final = "kvstore.connectors.sglang"


class ProcessWeights:
    """Updates of this process's weights.

    updates: number of updates noted. last: the latest, for messages.
    complete: False if weights may have been updated before the methods were watched.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.last = ""
        self.complete = True
        self.watched = False
        self.weight_version: str | None = None
        self.revisions: dict[str, int] = {}
        """User's revision -> number of updates when it named the weights."""

    def note(self, what: str) -> None:
        self.updates += 1
        self.last = what

    def compare_weight_version(self) -> None:
        """Note another `weight_version` than at the last call."""
        version = _weight_version()
        if version != self.weight_version:
            self.note(f"weight_version = {version!r}")
            self.weight_version = version


_process = ProcessWeights()


class WeightWatch:
    """One storage backend's question: are the weights still those that its namespace names?

    revision: the user's; "" if the weights are identified by their files.
    server_args: SGLang's ServerArgs; None outside a server, where weights do not change.

    Raises ConfigError: the weights are not those of the server's start, and `revision` does not
    name them; or this SGLang has other methods.
    """

    def __init__(self, revision: str, server_args: Any | None) -> None:
        if server_args is not None and not _process.watched:
            _watch(_process, server_args)
        _process.compare_weight_version()
        named_at = _process.revisions.setdefault(revision, _process.updates) if revision else None
        if named_at != _process.updates and (_process.updates or not _process.complete):
            raise ConfigError(_cannot_identify(revision))
        self._updates = _process.updates
        self._ended = ""

    def ended(self) -> str:
        """Why the weights are no longer those of the namespace; "" if they are."""
        if not self._ended:
            _process.compare_weight_version()
            if _process.updates != self._updates:
                self._ended = _process.last
                log.error(
                    "kvstore: the weights of this server were updated (%s); its pages are neither "
                    "found nor saved until the storage backend is attached again with a new "
                    "'revision'",
                    self._ended,
                )
        return self._ended


def _cannot_identify(revision: str) -> str:
    what = f"updated after the server's start ({_process.last})"
    if not _process.updates:
        what = "possibly updated before kvstore was attached"
    new = f"a string other than {revision!r}" if revision else "a string"
    return (
        f"the weights of this server were {what}; set 'revision' in the extra config to {new} "
        "that names the present weights"
    )


def _watch(process: ProcessWeights, server_args: Any) -> None:
    """Wrap SGLang's methods, once in a process."""
    for module, class_name, methods in WATCHED:
        try:
            owner = getattr(importlib.import_module(module), class_name)
            originals = [(method, getattr(owner, method)) for method in methods]
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"this release of SGLang is not supported, because kvstore cannot see updates of "
                f"its weights: {error}"
            ) from None
        for method, original in originals:
            setattr(owner, method, _noting(method, original))
    process.watched = True
    process.complete = _is_configured_at_start(server_args)
    process.weight_version = getattr(server_args, "weight_version", None)


def _noting(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, *arguments: Any, **more: Any) -> Any:
        if method != RELEASE or _loses_weights(*arguments):
            _process.note(method)
        return original(self, *arguments, **more)

    return noting


def _loses_weights(request: Any) -> bool:
    """True if a release of memory discards the weights without a copy: they come back as whatever
    the memory then has, until an update."""
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    tags = request.tags or [WEIGHTS_TAG]
    return (
        bool(features.enable_memory_saver)
        and not features.enable_weights_cpu_backup
        and WEIGHTS_TAG in tags
    )


def _is_configured_at_start(server_args: Any) -> bool:
    """True if the server was started with this backend, so that no update was missed."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    if server_args.hicache_storage_backend != "dynamic":
        return False
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(
        server_args.hicache_storage_backend_extra_config
    )
    return str(extra.get("module_path", "")).startswith(MODULE)


def _weight_version() -> str | None:
    """The label of the weights now; None outside a server."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, ValueError, AttributeError):  # no server
        return None

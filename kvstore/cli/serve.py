"""`kvstore serve`: the node's sidecar."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.cli.common.set_option import Assignments, assigned


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def serve(
        config: Annotated[
            str | None, typer.Option(help="TOML file; KVSTORE_* and the options here win over it.")
        ] = None,
        socket: Annotated[str | None, typer.Option(help="Unix socket for engines.")] = None,
        host: Annotated[str | None, typer.Option(help="Address of the HTTP side.")] = None,
        port: Annotated[int | None, typer.Option(help="Its port; 0: any free one.")] = None,
        l2: Annotated[str | None, typer.Option(help="Host memory for blocks, e.g. 4GiB.")] = None,
        slot: Annotated[
            str | None, typer.Option(help="Bytes of a slot: the largest block, e.g. 2MiB.")
        ] = None,
        slab_dir: Annotated[
            str | None, typer.Option(help="Memory file system for the slab, e.g. /dev/shm.")
        ] = None,
        eviction: Annotated[
            str | None, typer.Option(help="Order of eviction: lru, lfu, s3fifo, cost, auto.")
        ] = None,
        disk: Annotated[str | None, typer.Option(help="Folder of the disk tier.")] = None,
        disk_capacity: Annotated[
            str | None, typer.Option(help="Bytes it may keep, e.g. 50GiB.")
        ] = None,
        codec: Annotated[
            str | None, typer.Option(help="On disk: auto, identity, zstd-planes.")
        ] = None,
        write_policy: Annotated[
            str | None, typer.Option(help="write_through, selective or write_back.")
        ] = None,
        log_format: Annotated[
            str | None, typer.Option(help="Lines of the log: logfmt, json, text.")
        ] = None,
        log_level: Annotated[
            str | None, typer.Option(help="Least that is logged: debug, info, warning, error.")
        ] = None,
        set_: Assignments = None,
        verbose: Annotated[
            bool, typer.Option("--verbose", "-v", help="Log what happens: --log-level info.")
        ] = False,
    ) -> None:
        """Run the sidecar: one slab of host memory for every engine of this node.

        SIGHUP, or `kvstore config reload`, reads FILE anew. SIGTERM writes what waits, and ends.
        """
        from kvstore.config.settings import Settings, merged
        from kvstore.errors import ConfigError
        from kvstore.service.main import serve as run
        from kvstore.store.assembly import DISK_CAPACITY, disk_table

        if disk is None and (disk_capacity is not None or codec is not None):
            raise ConfigError("--disk-capacity and --codec go with --disk FOLDER")
        overrides: dict[str, Any] = _given(
            server=_given(socket=socket, host=host, port=port),
            l2=_given(bytes=l2, slot_bytes=slot, directory=slab_dir, eviction=eviction),
            write=_given(policy=write_policy),
            log=_given(format=log_format, level=log_level or ("info" if verbose else None)),
        )
        if disk is not None:
            capacity, codec = disk_capacity or DISK_CAPACITY, codec or "auto"
            overrides["tiers"] = [disk_table(disk, capacity, codec)]
        overrides = merged(overrides, assigned(set_))

        def load() -> Settings:
            return Settings.load(config, overrides)

        run(
            load(),
            announce=lambda line: print(line, flush=True),
            reread=load if config is not None else None,
        )


def _given(**values: Any) -> dict[str, Any]:
    """Those of `values` that the command line set."""
    return {key: value for key, value in values.items() if value is not None and value != {}}

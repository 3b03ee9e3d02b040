"""`kvstore serve`: runs the node's sidecar."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.cli.common.set_option import Assignments, assigned


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def serve(
        config: Annotated[
            str | None,
            typer.Option(help="Configuration file (TOML). KVSTORE_* and options override it."),
        ] = None,
        socket: Annotated[
            str | None, typer.Option(help="Path of the Unix socket for engines.")
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address of the HTTP server.")] = None,
        port: Annotated[
            int | None, typer.Option(help="Port of the HTTP server. 0: any free port.")
        ] = None,
        l2: Annotated[
            str | None, typer.Option(help="Size of L2 in host memory, such as 4GiB.")
        ] = None,
        slot_bytes: Annotated[
            str | None,
            typer.Option(help="Size of one slot, at least the largest block, such as 2MiB."),
        ] = None,
        l2_shm_dir: Annotated[
            str | None, typer.Option(help="Memory file system for L2, such as /dev/shm.")
        ] = None,
        eviction: Annotated[
            str | None, typer.Option(help="Eviction policy of L2: lru, lfu, s3fifo, gdsf or auto.")
        ] = None,
        disk: Annotated[str | None, typer.Option(help="Directory of the disk tier.")] = None,
        disk_capacity: Annotated[
            str | None, typer.Option(help="Maximum size of the disk tier, such as 50GiB.")
        ] = None,
        codec: Annotated[
            str | None,
            typer.Option(help="Codec of the disk tier: auto, none, zstd or byteshuffle-zstd."),
        ] = None,
        write_policy: Annotated[
            str | None,
            typer.Option(help="Write policy: write_through, selective or write_back."),
        ] = None,
        log_format: Annotated[
            str | None, typer.Option(help="Log format: logfmt, json or text.")
        ] = None,
        log_level: Annotated[
            str | None, typer.Option(help="Minimum log level: debug, info, warning or error.")
        ] = None,
        set_: Assignments = None,
        verbose: Annotated[
            bool, typer.Option("--verbose", "-v", help="Log more: same as --log-level info.")
        ] = False,
    ) -> None:
        """Run the sidecar: one slab of host memory for all engines of this node.

        SIGHUP, or `kvstore config reload`, reads the configuration file again. SIGTERM writes the
        queued blocks, then stops.
        """
        from kvstore.config.settings import Settings, merge
        from kvstore.errors import ConfigError
        from kvstore.service.main import serve as run
        from kvstore.store.assembly import DISK_CAPACITY, disk_table

        if disk is None and (disk_capacity is not None or codec is not None):
            raise ConfigError("--disk-capacity and --codec need --disk DIRECTORY")
        overrides: dict[str, Any] = _given(
            server=_given(socket=socket, host=host, port=port),
            l2=_given(bytes=l2, slot_bytes=slot_bytes, shm_directory=l2_shm_dir, eviction=eviction),
            write=_given(policy=write_policy),
            log=_given(format=log_format, level=log_level or ("info" if verbose else None)),
        )
        if disk is not None:
            capacity, codec = disk_capacity or DISK_CAPACITY, codec or "auto"
            overrides["tiers"] = [disk_table(disk, capacity, codec)]
        overrides = merge(overrides, assigned(set_))

        def load() -> Settings:
            return Settings.load(config, overrides)

        run(
            load(),
            announce=lambda line: print(line, flush=True),
            reread=load if config is not None else None,
        )


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are set on the command line."""
    return {key: value for key, value in values.items() if value is not None and value != {}}

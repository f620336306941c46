"""`piledriver watch [RUNS...]`: a local page for live and finished runs."""

from __future__ import annotations

import argparse
import sys

EXAMPLE = "piledriver watch runs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "runs", nargs="*", default=["."], metavar="RUNS", help="run folders, or folders of run folders (default: .)"
    )
    parser.add_argument("--port", type=int, default=8765, metavar="P", help="port; 0 for any free one (default 8765)")
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    import os

    from piledriver.core.errors import MissingFileError, UsageError
    from piledriver.observe.watch.server import WatchServer

    for folder in args.runs:
        if not os.path.isdir(folder):
            raise MissingFileError(folder, fix="name a run folder, or a folder that holds run folders")
    try:
        server = WatchServer(args.runs, port=args.port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen at port {args.port}: {error}", fix="use another --port, or 0") from error
    with server:
        count, port = len(server.workspace), server.server_address[1]
        print(f"{count} run{'' if count == 1 else 's'}: {server.url}", flush=True)
        tunnel = f"ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"
        print(
            f"Only this machine can open it. From another one: {tunnel}, then the same address there. Ctrl-C stops.",
            file=sys.stderr,
            flush=True,
        )
        if args.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.5)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0

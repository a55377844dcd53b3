"""A server on this machine that repeats each line except "hang", and records who has called."""

import contextlib
import socketserver
import threading


@contextlib.contextmanager
def echo():
    """Start the server. Return (port, a list that grows by one entry per connection)."""
    callers = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            callers.append(self.client_address)
            for line in self.rfile:
                if line != b"hang\n":
                    self.wfile.write(line)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server.server_address[1], callers
        server.shutdown()

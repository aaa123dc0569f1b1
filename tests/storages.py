"""Object storage for tests, on this machine: emulators of Google Cloud Storage and of S3, each a process."""

import functools
import io
import itertools
import os
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

BUCKET, DENIED = "bucket", "denied"
"""The bucket of each storage, and one of Google's that nobody may use."""
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@functools.cache
def storage(scheme):
    """Start the storage of these addresses, once for this process; set the variables by which it is found."""
    program = [sys.executable, __file__, scheme]
    # It ends with this process, which holds the other end of its input.
    server = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    where = server.stdout.readline().strip()
    names = ("AWS_ENDPOINT_URL",) if scheme == "s3" else ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    os.environ.update(dict.fromkeys(names, where) | KEYS)
    return server


def on_another_machine(folder):
    """Have the mirrors in this folder from here on, as a machine with another cache has them elsewhere."""
    os.environ["JAXRL_LLM_CACHE"] = str(folder)


def google():
    """Return a running emulator of Google Cloud Storage."""
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    class Generations(Storage):
        """The emulator's objects, of which each write has a generation of its own."""

        def __init__(self):
            super().__init__(use_memory_fs=True)
            self.lock = threading.RLock()
            self.count = itertools.count(1)

        def create_file(self, bucket_name, file_name, content, file_obj, file_id=None):
            file_obj["generation"] = str(next(self.count))
            super().create_file(bucket_name, file_name, content, file_obj, file_id)

        def generation(self, where):
            """The generation of the object that a path or a query names; 0 without one."""
            bucket, _, name = where.path.split("/b/")[1].partition("/o")
            name = parse_qs(where.query).get("name", [name.removeprefix("/")])[0]
            return self.objects.get(bucket, {}).get(unquote(name), {}).get("generation", "0")

    class Handler(RequestHandler):
        """The emulator, with what it lacks: rights, and the precondition of a write."""

        def refused(self):
            """Whether the request is answered: no right, or an object of another generation than the named one."""
            where = urlparse(self.path)
            if f"/b/{DENIED}/" in where.path:
                self.send_error(401, "Anonymous caller does not have storage.objects.list access")
                return True
            wanted = parse_qs(where.query).get("ifGenerationMatch")
            if wanted is None or self.storage.generation(where) == wanted[0]:
                return False
            self.send_error(412)
            return True

        def end_headers(self):
            where = urlparse(self.path)
            if "/o/" in where.path:
                self.send_header("x-goog-generation", self.storage.generation(where))
            super().end_headers()

        def do_GET(self):
            self.refused() or super().do_GET()

        def do_POST(self):
            if "Content-Length" in self.headers:  # a client that is stopped in the middle holds no lock
                self.rfile = io.BytesIO(self.rfile.read(int(self.headers["Content-Length"])))
            with self.storage.lock:
                self.refused() or super().do_POST()

    objects = Generations()
    buckets.create_bucket(BUCKET, objects)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, objects))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def amazon():
    """Return a running emulator of S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    where = "http://{}:{}".format(*server.get_host_and_port())
    os.environ.update(KEYS)
    boto3.client("s3", endpoint_url=where).create_bucket(Bucket=BUCKET)
    return where


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # whose folders have names of packages
    print({"gs": google, "s3": amazon}[sys.argv[1]](), flush=True)
    sys.stdin.read()
    os._exit(0)

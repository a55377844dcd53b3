"""Google Cloud Storage on this machine: the part of its JSON API that tensorstore, gcsfs and Google's client use.

Every bucket exists and is empty. Objects are in memory. A write is atomic and visible at once, as in the real service.
"""

from __future__ import annotations

import contextlib
import email
import email.policy
import http.server
import itertools
import json
import re
import threading
import urllib.parse


class Refused(Exception):
    """An HTTP error status instead of an answer."""


class History(dict):
    """Changes of the store. With ``states``, the content after each change, if a test asks for it."""

    states: list | None = None

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._note()

    def __delitem__(self, key):
        super().__delitem__(key)
        self._note()

    def _note(self):
        if self.states is not None:
            self.states.append(dict(self))


class Store:
    """Objects by (bucket, name), each with its generation."""

    def __init__(self):
        self.objects: History[tuple[str, str], tuple[bytes, int]] = History()
        self.lock = threading.Lock()
        self.generations = itertools.count(1)
        self.uploads: dict[str, tuple[str, dict, bytes]] = {}  # in parts: name, what was asked, what has come

    def about(self, key):
        data, generation = self.objects[key]
        more = {"generation": str(generation), "metageneration": "1", "contentType": "application/octet-stream"}
        times = dict.fromkeys(("updated", "timeCreated"), "2026-01-01T00:00:00.000Z")
        return {"kind": "storage#object", "bucket": key[0], "name": key[1], "size": str(len(data)), **more, **times}

    def check(self, key, query):
        """Check a conditional request: the current generation must match; 0 = the object must not exist."""
        now = self.objects[key][1] if key in self.objects else 0
        if int(query.get("ifGenerationMatch", now)) != now:
            raise Refused(412)
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == now:
            raise Refused(304)

    def write(self, key, query, data):
        with self.lock:
            self.check(key, query)
            self.objects[key] = data, next(self.generations)
            return self.about(key)

    def delete(self, key, query):
        with self.lock:
            if key not in self.objects:
                raise Refused(404)
            self.check(key, query)
            del self.objects[key]

    def list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset") or "\U0010ffff"
        items, prefixes = [], {}
        with self.lock:
            for key in sorted(key for key in self.objects if key[0] == bucket):
                name = key[1]
                if not name.startswith(prefix) or not start <= name < end:
                    continue
                head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if cut:
                    prefixes[prefix + head + cut] = None
                else:
                    items.append(self.about(key))
        return {"kind": "storage#objects", "items": items, "prefixes": list(prefixes)}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_):
        pass

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers, answer = self.answer(self.command, self.path, self.headers, body)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(answer))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any

    def answer(self, method, url, headers, body):
        """Return status, headers and body of the answer."""
        path, _, query = url.partition("?")
        path = re.sub("^https?://[^/]*", "", path)
        query = dict(urllib.parse.parse_qsl(query))
        try:
            given = self.route(method, path, query, headers, body)
        except Refused as refused:
            status = refused.args[0]
            text = json.dumps({"error": {"code": status, "message": f"{status}"}}).encode()
            return status, {}, b"" if status == 304 else text
        if isinstance(given, tuple):
            return given
        text = b"" if given is None else json.dumps(given).encode()
        return 200 if text else 204, {"Content-Type": "application/json"}, text

    def route(self, method, path, query, headers, body):
        store = self.store
        if path.startswith("/upload/"):
            return self.upload(method, path, query, headers, body)
        pattern = r"(?:/download)?(?:/storage/v1)?/b/([^/]+)(?:/o(?:/([^/]+))?)?(?:/rewriteTo/b/([^/]+)/o/(.+))?"
        found = re.fullmatch(pattern, path)
        if not found:
            raise Refused(404)
        bucket, name, to_bucket, to_name = (x and urllib.parse.unquote(x) for x in found.groups())
        if name is None:
            return store.list(bucket, query) if path.endswith("/o") else {"kind": "storage#bucket", "name": bucket}
        key = bucket, name
        if method == "DELETE":
            return store.delete(key, query)
        with store.lock:
            if key not in store.objects:
                raise Refused(404)
            data, generation = store.objects[key]
            about = store.about(key)
        if to_name:
            copy = store.write((to_bucket, to_name), query, data)
            return {"kind": "storage#rewriteResponse", "done": True, "resource": copy}
        if query.get("alt") != "media" and not path.startswith("/download"):
            return about
        store.check(key, query)
        told = {"Content-Type": "application/octet-stream", "x-goog-generation": str(generation)}
        if part := re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", "")):
            total = len(data)
            first = int(part[1]) if part[1] else total - int(part[2])
            last = min(int(part[2]), total - 1) if part[1] and part[2] else total - 1
            if first > last:
                raise Refused(416)
            return 206, told | {"Content-Range": f"bytes {first}-{last}/{total}"}, data[first : last + 1]
        return 200, told, data

    def upload(self, method, path, query, headers, body):
        store, bucket = self.store, urllib.parse.unquote(re.search("/b/([^/]+)/o", path)[1])
        kind = query.get("uploadType")
        if kind == "media":
            return store.write((bucket, query["name"]), query, body)
        if kind == "multipart":
            about, data = parts_of(headers["Content-Type"], body)
            name = json.loads(about.get_payload(decode=True))["name"]
            return store.write((bucket, name), query, data.get_payload(decode=True))
        if "upload_id" not in query:  # resumable, in parts
            number = str(next(store.generations))
            store.uploads[number] = query.get("name") or json.loads(body)["name"], query, b""
            where = f"http://{headers['Host']}{path}?uploadType=resumable&upload_id={number}"
            return 200, {"Location": where}, b""
        name, first, before = store.uploads[query["upload_id"]]
        store.uploads[query["upload_id"]] = name, first, (data := before + body)
        if headers.get("Content-Range", "").endswith("/*"):
            return 308, {"Range": f"bytes=0-{len(data) - 1}"} if data else {}, b""
        return store.write((bucket, name), first, data)


def parts_of(content_type, body):
    whole = b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body
    return email.message_from_bytes(whole, policy=email.policy.HTTP).get_payload()


@contextlib.contextmanager
def serving():
    """Start such a server while entered. Yield its address and its objects."""
    handler = type("Here", (Handler,), {"store": Store()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that went away
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.store.objects
    finally:
        server.shutdown()
        server.server_close()


def environment(address):
    """Return the environment variables that point all three clients to it."""
    nobody = {"GOOGLE_CLOUD_PROJECT": "none", "NO_GCE_CHECK": "true"}  # no credentials, and none are looked for
    return {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address, **nobody}

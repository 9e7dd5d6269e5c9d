"""What keeps the page to its user: names of the server, pages of others, the token, and the folder it stays in."""

import hmac
import json
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest
from asgi import Client

from halfstep.watch import server
from halfstep.watch.access import host_name
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.server import make_app

TOKEN = "correct-horse_battery.staple"
HOSTILE = "<img src=x onerror=alert(1)>"


def write(folder, message="up"):
    folder.mkdir(parents=True)
    alert = {"kind": "alert", "time": 3.0, "rule": "loss-spike", "step": 1, "severity": "note", "message": message}
    entries = [RunStart(1.0, policy=message).to_entry(), Step(1, 2.0, 0.5, 1.0).to_entry(), alert]
    (folder / "rank-00000.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "runs" / "mine")
    write(tmp_path / "secret")
    return tmp_path / "runs"


@pytest.fixture
def open_to_all(runs):
    with Client(make_app(runs, token=None, hosts=["gpu7"])) as client:
        yield client


@pytest.fixture
def guarded(runs):
    with Client(make_app(runs, token=TOKEN, hosts=["gpu7", "0.0.0.0"])) as client:
        yield client


ADDRESSES = ["/", "/runs.json", "/run/mine", "/run/mine.json", "/run/none.json", "/compare.json", "/metrics", "/no"]
ADDRESSES += ["/static/page.js", "/static/plotly.js"]

# Names of the server.


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]", "gpu7:8000", "GPU7"]
)
def test_its_own_names_are_answered(open_to_all, host):
    # A tunnel has a port of its own, which is in the header then.
    assert open_to_all.get("/runs.json", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example:8000",
        "localhost.evil.example",
        "evil.example#localhost",
        "localhost@evil.example",
        "evil.example@localhost:8000",
        "127.0.0.2:8000",
        "10.0.0.7:8000",
        "0.0.0.0:8000",
        "[::1",
        "[::1]x:8000",
        "x[::1]",
        "::1",
        "localhost:80:80",
        "localhost:x",
        "",
        None,
        ["localhost", "evil.example"],
        ["localhost", "localhost"],
    ],
)
@pytest.mark.parametrize("address", ["/", "/runs.json", "/static/page.js"])
def test_a_foreign_name_is_refused(open_to_all, host, address):
    answer = open_to_all.get(address, host=host)
    assert answer.status == 421
    assert "mine" not in answer.body.decode()


def test_a_server_on_every_address_is_known_by_each_but_by_no_other_name(guarded):
    bearer = f"Bearer {TOKEN}"
    for host in ("10.0.0.7:8000", "[2001:db8::7]:8000", "gpu7", "127.0.0.1"):
        assert guarded.get("/runs.json", host=host, authorization=bearer).status == 200
    for host in ("evil.example", "10.0.0.7.evil.example", "gpu7.evil.example"):
        assert guarded.get("/runs.json", host=host, authorization=bearer).status == 421


def test_the_name_in_a_host_header():
    assert [host_name(host) for host in ("A.b:1", "[::1]:1", "a]", "[a]b", "a:b", "")] == ["a.b", "::1", "", "", "", ""]


# Pages of others.


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://localhost:8000",
        "",
        "127.0.0.1:8000",
        ["x://a", "b"],
    ],
)
def test_a_foreign_origin_is_refused(open_to_all, origin):
    assert open_to_all.get("/runs.json", origin=origin).status == 403


def test_its_own_origin_is_answered(open_to_all):
    assert open_to_all.get("/runs.json", origin="http://127.0.0.1:8000").status == 200
    assert open_to_all.get("/runs.json", origin="http://localhost:9", host="localhost:9").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    ("mode", "dest"),
    [
        ("no-cors", "script"),
        ("cors", "empty"),
        ("no-cors", "image"),
        ("navigate", "iframe"),
        ("navigate", "object"),
        (None, None),
    ],
)
def test_another_site_reads_nothing(open_to_all, site, mode, dest):
    answer = open_to_all.get("/runs.json", sec_fetch_site=site, sec_fetch_mode=mode, sec_fetch_dest=dest)
    assert answer.status == 403


def test_a_link_to_the_page_may_be_followed(open_to_all):
    how = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert open_to_all.get("/run/mine", sec_fetch_site="cross-site", **how).status == 200
    assert open_to_all.get("/run/mine", sec_fetch_site="none", **how).status == 200
    assert open_to_all.get("/runs.json", sec_fetch_site="same-origin", sec_fetch_mode="cors").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_only_reading_is_possible(open_to_all, method):
    for address in ("/", "/runs.json", "/run/mine.json", "/static/page.js", "/no"):
        answer = open_to_all.get(address, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_is_possible(open_to_all):
    assert open_to_all.get("/run/mine.json", method="HEAD").status == 200


def test_nobody_is_allowed_to_read_across_origins(open_to_all):
    for address in ADDRESSES:
        answer = open_to_all.get(address, origin="http://127.0.0.1:8000")
        assert not [name for name in answer.headers if name.startswith("access-control")]


# What the browser is told.


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_every_answer_has_the_rules(open_to_all, address, host):
    answer = open_to_all.get(address, host=host)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data: blob:",
        "style-src": "'self' 'unsafe-inline'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    is_file = address.startswith("/static/") and host == "localhost"
    assert answer.headers["cache-control"] == ("private, no-cache" if is_file else "no-store")


def test_names_and_messages_are_data(tmp_path):
    name = f"{HOSTILE}'\"& \u202e"
    write(tmp_path / "runs" / name, HOSTILE)
    with Client(make_app(tmp_path / "runs", token=None, hosts=[])) as client:
        page = client.get("/run/" + urllib.request.pathname2url(name))
        assert page.status == 200
        assert page.body == client.get("/").body
        assert HOSTILE not in page.body.decode()
        for address in ("/runs.json", "/run/" + urllib.request.pathname2url(name) + ".json"):
            answer = client.get(address)
            assert answer.headers["content-type"] == "application/json"
            assert HOSTILE in answer.body.decode()
        missing = client.get("/run/%3Cscript%3E.json")
        assert (missing.status, missing.headers["content-type"]) == (404, "application/json")


def test_the_page_has_no_script_of_its_own(open_to_all):
    page = open_to_all.get("/").body.decode()
    assert page.count("<script") == page.count('<script type="module" src="/static/')
    assert not [word for word in ("onload=", "onerror=", "javascript:", "http://", "https://") if word in page]


# The token.


@pytest.mark.parametrize("address", ADDRESSES)
def test_nothing_without_the_token(guarded, address):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer"},
        {"cookie": "halfstep-8000=wrong"},
        {"cookie": f"other={TOKEN}; halfstep-8001={TOKEN}"},
        {"cookie": "halfstep-8000="},
        {"cookie": "halfstep-8000"},
    ):
        answer = guarded.get(address, **headers)
        assert answer.status == 401
        assert "mine" not in answer.body.decode()
        assert answer.json() == {
            "error": "The token is missing or wrong. Open the whole address that halfstep watch printed."
        }
    for query in ("token=", "token=wrong", f"token={TOKEN}x", f"token={TOKEN}&token=x", "token=%C3%A9%FF"):
        answer = guarded.get(f"{address}?{query}")
        assert answer.status == 401
        assert "set-cookie" not in answer.headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(guarded):
    answer = guarded.get(f"/run/mine?token={TOKEN}&first=3&x=%26%20a")
    assert answer.status == 303
    assert answer.headers["location"] == "/run/mine?first=3&x=%26+a"
    assert answer.headers["set-cookie"] == f"halfstep-8000={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    cookie = answer.headers["set-cookie"].partition(";")[0]
    for given in (cookie, f'broken="{{; {cookie};x=y', [f"a={TOKEN}", cookie]):
        assert guarded.get("/run/mine.json", cookie=given).status == 200
    assert guarded.get("/run/mine.json?token=old", cookie=cookie).status == 200
    assert guarded.get(f"/?token={TOKEN}").headers["location"] == "/"


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("//evil.example/", "/evil.example/"),
        ("/%2Fevil.example", "/evil.example"),
        ("/\\evil.example", "/%5Cevil.example"),
        ("/%5Cevil.example", "/%5Cevil.example"),
        ("/a%0d%0aSet-Cookie:%20x=y", "/a%0D%0ASet-Cookie%3A%20x%3Dy"),
        ("/run/a%20b", "/run/a%20b"),
    ],
)
def test_the_way_back_leads_nowhere_else(guarded, path, location):
    assert guarded.get(f"{path}?token={TOKEN}").headers["location"] == location


def test_programs_send_it_as_a_header(guarded):
    for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert guarded.get("/metrics", authorization=header).status == 200


def test_tokens_are_compared_without_a_hint_of_how_much_is_right(guarded, monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((a, b)), compare(a, b))[1])
    guarded.get("/", authorization="Bearer guess")
    guarded.get("/", cookie="halfstep-8000=guess")
    guarded.get("/?token=guess")
    assert compared == [(b"guess", TOKEN.encode())] * 3


def test_a_foreign_page_is_refused_with_the_token_too(guarded):
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert guarded.get("/runs.json", host="evil.example", **bearer).status == 421
    assert guarded.get("/runs.json", origin="http://evil.example", **bearer).status == 403
    assert guarded.get(f"/?token={TOKEN}", sec_fetch_site="cross-site").status == 403


def test_only_http_is_spoken(runs):
    import asyncio

    sent = []

    async def connect(kind):
        scope = {"type": kind, "path": "/", "headers": [], "query_string": b"", "subprotocols": []}

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        await make_app(runs, token=None, hosts=[])(scope, receive, send)

    asyncio.run(connect("websocket"))
    assert [message["type"] for message in sent] == ["websocket.close"]


# The server itself.


def served(runs, host, token, monkeypatch):
    """Starts serve() in a thread; gives its address, and a function that ends it."""
    import uvicorn

    urls, started, servers = [], threading.Event(), []

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)

    def ready(url):
        urls.append(url)
        started.set()

    thread = threading.Thread(target=server.serve, args=(runs, host, 0, token, [], ready))
    thread.start()
    assert started.wait(20)

    def end():
        servers[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    return urls[0], end


def status_of(url, **headers):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.url
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.url


def test_another_address_gets_a_token_and_nothing_of_it_is_logged(runs, monkeypatch, caplog, capfd):
    caplog.set_level(0)
    url, end = served(runs, "0.0.0.0", None, monkeypatch)
    try:
        port, token = url.rpartition(":")[2].split("/?token=")
        assert url == f"http://{socket.gethostname()}:{port}/?token={token}"
        assert len(token) >= 32
        base = f"http://127.0.0.1:{port}/"
        assert status_of(f"{base}?token={token}") == (200, base)
        assert status_of(base)[0] == 401
        assert status_of(f"{base}?token={token[:-1]}")[0] == 401
        assert status_of(f"{base}runs.json", Authorization=f"Bearer {token}")[0] == 200
        assert status_of(f"{base}runs.json", Authorization=f"Bearer {token}", Host="evil.example")[0] == 421
    finally:
        end()
    assert token not in caplog.text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("token", "query"), [(None, ""), (TOKEN, f"?token={TOKEN}")])
def test_this_machine_needs_a_token_only_when_told_so(runs, monkeypatch, token, query):
    url, end = served(runs, "127.0.0.1", token, monkeypatch)
    try:
        assert url.endswith(f"/{query}")
        assert status_of(url)[0] == 200
    finally:
        end()


def test_two_tokens_are_two(runs, monkeypatch):
    tokens = []

    class Stop(Exception):
        pass

    def ready(url):
        tokens.append(url.partition("token=")[2])
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            server.serve(runs, "0.0.0.0", 0, None, [], ready)
    assert len({*tokens, ""}) == 3


def test_this_machine_has_several_addresses():
    for host in ("127.0.0.1", "localhost", "127.8.8.8"):
        with server._listen(host, 0) as listener:
            assert server._needs_token(listener) is False
    with server._listen("0.0.0.0", 0) as listener:
        assert server._needs_token(listener) is True


# The folder.

OUTSIDE = [
    "../secret",
    "%2e%2e/secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "%252e%252e%252fsecret",
    "mine/../../secret",
    "mine/%2e%2e/%2e%2e/secret",
    "..\\secret",
    "..%5csecret",
    "..%c0%afsecret",
    "%u002e%u002e/secret",
    ".",
    "..",
    "./mine",
    "mine/.",
    "mine/..",
    "mine//",
    "/mine",
    "",
    "%00",
    "mine%00",
    "mine%00.json/../../secret",
    "..;/secret",
    "linked",
    "linked/",
    "inside/linked",
    "loop",
    "loop/mine",
    "aliased",
    "pipe",
    "piped",
    "file",
    "mine/rank-00000.jsonl",
    "a" * 5000,
    "a/" * 2000,
]


@pytest.fixture
def traps(runs, tmp_path):
    """Ways out of the folder: links to folders and files, inside and outside, and pipes that nobody writes to."""
    (runs / "linked").symlink_to(tmp_path / "secret")
    (runs / "inside").mkdir()
    (runs / "inside" / "linked").symlink_to(tmp_path / "secret")
    (runs / "loop").symlink_to(runs)
    (runs / "aliased").mkdir()
    (runs / "aliased" / "rank-00000.jsonl").symlink_to(tmp_path / "secret" / "rank-00000.jsonl")
    os.mkfifo(runs / "pipe")
    (runs / "piped").mkdir()
    os.mkfifo(runs / "piped" / "rank-00000.jsonl")
    (runs / "file").write_text("text")
    return runs


@pytest.mark.parametrize("absolute", [False, True])
def test_only_what_is_inside_is_shown(traps, tmp_path, absolute):
    names = [str(tmp_path / "secret"), f"%2f{tmp_path}/secret", f"/{tmp_path}/secret"] if absolute else OUTSIDE
    with Client(make_app(traps, token=None, hosts=[])) as client:
        assert [run["name"] for run in client.get("/runs.json").json()["runs"]] == ["mine"]
        for name in names:
            for address in (f"/run/{name}.json", f"/compare.json?run={name}", f"/compare.json?run=mine&run={name}"):
                answer = client.get(address)
                assert answer.status == 404, address
                (line,) = answer.json()["error"].splitlines()
                assert len(line) < 10_300
            page = client.get(f"/run/{name}")
            assert (page.status, page.body) == (404, client.get("/").body) if name != "mine//" else True
    assert os.listdir(tmp_path / "secret") == ["rank-00000.jsonl"]


def test_a_run_that_becomes_a_link_while_it_is_open_is_gone(runs, tmp_path):
    with Client(make_app(runs, token=None, hosts=[])) as client:
        assert client.get("/run/mine.json").status == 200
        (runs / "mine").rename(tmp_path / "moved")
        (runs / "mine").symlink_to(tmp_path / "secret")
        assert client.get("/run/mine.json").status == 404
        assert client.get("/runs.json").json()["runs"] == []


def test_an_index_that_is_a_link_is_not_followed(runs, tmp_path):
    target = tmp_path / "precious.sqlite"
    (runs / "mine" / ".index-00000.sqlite").symlink_to(target)
    with Client(make_app(runs, token=None, hosts=[])) as client:
        assert client.get("/run/mine.json").status == 200
    assert not target.exists()


@pytest.mark.parametrize(
    "name", ["../server.py", "%2e%2e%2fserver.py", "..%5cserver.py", "/etc/passwd", "page.js%00", "."]
)
def test_files_of_the_page_are_a_fixed_list(open_to_all, name):
    assert open_to_all.get(f"/static/{name}").status == 404


def test_a_folder_that_is_itself_a_link_is_what_was_asked_for(runs, tmp_path):
    (tmp_path / "shortcut").symlink_to(runs)
    with Client(make_app(tmp_path / "shortcut", token=None, hosts=[])) as client:
        assert client.get("/run/mine.json").status == 200


def test_errors_say_nothing_of_where_the_folder_is(open_to_all, tmp_path):
    for address in ("/run/none.json", "/run/../secret.json", "/compare.json?run=../secret", "/run/mine.json?rank=4"):
        assert str(tmp_path) not in open_to_all.get(address).body.decode()

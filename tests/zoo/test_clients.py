"""Programs that people have, as they write their requests: curl, wget, Node's fetch,
Java, requests, httpx, boto3.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from serving import Running

JAVA = """
import java.net.URI;
import java.net.http.*;
import java.nio.file.Path;

class Ask {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();  // offers to upgrade to HTTP/2
        for (int i = 0; i < 2; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
                .header("Content-Type", "image/jpeg").POST(HttpRequest.BodyPublishers.ofFile(Path.of(args[1]))).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
        }
    }
}
"""
NODE = """
const [url, path] = process.argv.slice(2), data = require("fs").readFileSync(path);
const form = new FormData();
form.append("token", "hunter2");
form.append("file", new Blob([data], {type: "image/jpeg"}), "dish.jpg");
form.append("second", new File([], ""));
const address = `data:image/jpeg;base64,${data.toString("base64")}`, headers = {"content-type": "application/json"};
const picture = new Blob([data], {type: "image/jpeg"});
const bodies = [{body: form}, {body: JSON.stringify({image: address}), headers}, {body: picture}];
(async () => { for (const one of bodies) console.log(await (await fetch(url, {method: "POST", ...one})).text()); })();
"""
REQUESTS = """
import requests
photo = open(sys.argv[2], "rb").read()
with requests.Session() as session:
    for sent in (
        {"files": {"file": ("dish.jpg", photo)}, "data": {"csrf": "hunter2"}},
        {"files": {"file": open(sys.argv[2], "rb")}},
        {"json": {"image": base64.b64encode(photo).decode()}},
        {"json": {"images": [base64.encodebytes(photo).decode()]}},
        {"data": gzip.compress(photo), "headers": {"content-type": "image/jpeg", "content-encoding": "gzip"}},
        {"data": iter([photo[:50], photo[50:]]), "headers": {"content-type": "image/jpeg"}},
    ):
        print(session.post(sys.argv[1], **sent).text)
"""
HTTPX = """
photo = open(sys.argv[2], "rb").read()
with package.Client() as client:
    print(client.post(sys.argv[1], files={"file": ("dish.jpg", photo, "image/jpeg")}, data={"note": "x"}).text)
    print(client.post(sys.argv[1], content=photo, headers={"content-type": "image/jpeg"}).text)
"""
AIOHTTP = """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        form = aiohttp.FormData({"note": "x"})
        form.add_field("file", open(sys.argv[2], "rb"), filename="dish.jpg")
        for sent in (form, open(sys.argv[2], "rb")):  # a file: application/octet-stream
            async with session.post(sys.argv[1], data=sent) as response:
                print(await response.text())
asyncio.run(main())
"""
BOTO3 = """
import boto3, botocore
root, keys = sys.argv[1].removesuffix("/invocations"), {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
client = boto3.client("sagemaker-runtime", endpoint_url=root, region_name="us-east-1", **keys)
photo = open(sys.argv[2], "rb").read()
for kind in ({}, {"ContentType": "image/jpeg", "Accept": "application/json"}):
    print(client.invoke_endpoint(EndpointName="food", Body=photo, **kind)["Body"].read().decode())
try:
    client.invoke_endpoint(EndpointName="food", Body=b"no image")
except botocore.exceptions.ClientError as error:
    assert "not an image in one of the formats JPEG" in str(error), error
else:
    raise AssertionError("no error")
"""
PREAMBLE = "import base64, gzip, sys\n"


def python(code: str, package: str) -> Callable[[str, Path], list[str] | str]:
    def argv(url: str, photo: Path) -> list[str] | str:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        return [
            sys.executable,
            "-c",
            f"import {package} as package\n" + PREAMBLE + code,
            url,
            str(photo),
        ]

    return argv


def curl(*options: str) -> Callable[[str, Path], list[str]]:
    return lambda url, photo: [
        "curl",
        "-sS",
        *(option.replace("PHOTO", str(photo)) for option in options),
        url,
    ]


def shell(line: str) -> Callable[[str, Path], list[str]]:
    return lambda url, photo: [
        "bash",
        "-c",
        line.replace("PHOTO", str(photo)).replace("URL", url),
    ]


def script(program: str, name: str, content: str) -> Callable[[str, Path], list[str]]:
    def argv(url: str, photo: Path) -> list[str]:
        (photo.parent / name).write_text(content)
        return [program, str(photo.parent / name), url, str(photo)]

    return argv


JPEG = "content-type: image/jpeg"
FILE = ("--data-binary", "@PHOTO", "-H", JPEG)
CLIENTS: dict[str, tuple[int, Callable[[str, Path], list[str] | str]]] = {
    "curl, the file": (1, curl(*FILE)),
    "curl, a form": (1, curl("-F", "file=@PHOTO", "-F", "top=5", "-F", "csrf=hunter2")),
    "curl, a form without filename": (1, curl("-F", "file=<PHOTO;type=image/jpeg")),
    "curl, two files": (2, curl("-F", "a=@PHOTO", "-F", "b=@PHOTO;filename=caf\u00e9 \"1\".jpg")),
    "curl, through a proxy": (1, curl(*FILE, "--proxy", "PROXY")),
    "curl, chunks": (1, curl("-T", "PHOTO", "-X", "POST", "-H", "transfer-encoding: chunked", "-H", JPEG)),
    "curl, expect": (1, curl(*FILE, "-H", "expect: 100-continue")),
    "curl, offering http2": (1, curl("--http2", *FILE)),
    "curl, http 1.0": (1, curl("--http1.0", *FILE)),
    "the shell's base64": (
        1, shell("""(printf '{"image": "'; base64 -w0 PHOTO; printf '"}') | curl -sS --json @- URL"""),
    ),
    "the shell's gzip": (
        1, shell(f"gzip -c PHOTO | curl -sS --data-binary @- -H 'content-encoding: gzip' -H '{JPEG}' URL"),
    ),
    "wget": (1, lambda url, photo: ["wget", "-qO-", "--no-proxy", f"--post-file={photo}", f"--header={JPEG}", url]),
    "node": (3, script("node", "ask.js", NODE)),
    "java": (2, script("java", "Ask.java", JAVA)),
    "requests": (6, python(REQUESTS, "requests")),
    "httpx": (2, python(HTTPX, "httpx" if importlib.util.find_spec("httpx") else "httpx2")),
    "aiohttp": (2, python(AIOHTTP, "aiohttp")),
    "boto3": (2, python(BOTO3, "boto3")),
}  # fmt: skip

SLOW = {"java": pytest.mark.slow}  # it compiles its file first


@pytest.fixture(scope="module")
def server(exported):
    with Running(exported, "--quiet") as running:
        yield running
        assert running.stop() == 0, running.errors
    assert running.errors == "", (
        "with --quiet nothing is said, also where Java offers to upgrade"
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in CLIENTS]
)
def test_a_client_gets_the_answers_of_the_model(name, server, photos, tmp_path):
    photo = (
        tmp_path / "dish of rice.jpg"
        if name.startswith("curl")
        else tmp_path / "dish.jpg"
    )
    shutil.copy(next((photos / "val/fig").glob("*.jpg")), photo)
    root = f"http://{server.host}:{server.port}"
    answers, make = CLIENTS[name]
    argv = make(f"{root}/invocations", photo)
    if isinstance(argv, str) or shutil.which(argv[0]) is None:
        pytest.skip(argv if isinstance(argv, str) else f"{argv[0]} is not installed")
    ran = subprocess.run(
        [argument.replace("PROXY", root) for argument in argv],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    (expected,) = server.post(photo.read_bytes()).json["predictions"]
    answers_of_photo = [
        prediction
        for line in ran.stdout.replace("}{", "}\n{").splitlines()
        for prediction in json.loads(line)["predictions"]
    ]
    assert answers_of_photo == [expected] * answers

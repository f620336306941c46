"""The rules of The Pile for files of a source tree, by name and by content: only code that people wrote is taken."""

from __future__ import annotations

from piledriver.corpus.text.data_table import word_set
from piledriver.corpus.text.normalise import NotTextError, decode_text, is_binary

MAX_CHARACTERS = 100_000
MAX_BYTES = 4 * MAX_CHARACTERS
MAX_DIGIT_SHARE = 0.8
MAX_MEAN_LINE = 200

_DATA_ENDINGS = word_set(
    """
    7z a apk app avi avif bin bmp bz2 class csv dat db deb dex dll dmg doc docx dylib ear egg eot exe flac flv
    gif gitignore glif gz h5 heic ico ipa iso jar jpeg jpg keystore lib lo lock log m4a mkv mo mov mp3 mp4 mpeg
    nar nib npy npz o obj ogg ogv onnx otf p12 parquet pb pdb pdf pem pfx pickle pkl png ppt pptx psd pt pth pyc
    pyd pyo rar rpm so sqlite sqlite3 svg swf tar tgz tif tiff tsv ttf war wasm wav webm webp whl woff woff2 xls
    xlsx xz z zip zst
    """
)
_LANGUAGES = {
    "py": "Python", "pyi": "Python", "js": "JavaScript", "mjs": "JavaScript", "cjs": "JavaScript", "jsx": "JavaScript",
    "ts": "TypeScript", "tsx": "TypeScript", "c": "C", "h": "C", "cc": "C++", "cpp": "C++", "cxx": "C++", "hpp": "C++",
    "hh": "C++", "java": "Java", "kt": "Kotlin", "scala": "Scala", "go": "Go", "rs": "Rust", "rb": "Ruby", "php": "PHP",
    "cs": "C#", "fs": "F#", "swift": "Swift", "m": "Objective-C", "mm": "Objective-C++", "r": "R", "jl": "Julia",
    "lua": "Lua", "pl": "Perl", "pm": "Perl", "sh": "Shell", "bash": "Shell", "zsh": "Shell", "ps1": "PowerShell",
    "hs": "Haskell", "ml": "OCaml", "mli": "OCaml", "ex": "Elixir", "exs": "Elixir", "erl": "Erlang", "clj": "Clojure",
    "lisp": "Common Lisp", "el": "Emacs Lisp", "scm": "Scheme", "rkt": "Racket", "sql": "SQL", "html": "HTML",
    "htm": "HTML", "css": "CSS", "scss": "SCSS", "less": "Less", "vue": "Vue", "svelte": "Svelte", "json": "JSON",
    "yaml": "YAML", "yml": "YAML", "toml": "TOML", "ini": "INI", "xml": "XML", "md": "Markdown",
    "rst": "reStructuredText", "txt": "Text", "tex": "TeX",
    "ipynb": "Jupyter Notebook", "dart": "Dart", "groovy": "Groovy", "gradle": "Gradle",
    "asm": "Assembly", "s": "Assembly", "f": "Fortran", "f90": "Fortran", "v": "Verilog", "sv": "SystemVerilog",
    "vhd": "VHDL", "zig": "Zig", "nim": "Nim", "d": "D", "pas": "Pascal", "proto": "Protocol Buffers", "tf": "HCL",
    "cmake": "CMake", "mk": "Makefile", "bat": "Batchfile", "vim": "Vim Script", "cu": "CUDA", "glsl": "GLSL",
}  # fmt: skip
_NAMES = {
    "makefile": "Makefile", "dockerfile": "Dockerfile", "cmakelists.txt": "CMake", "rakefile": "Ruby",
    "gemfile": "Ruby",
}  # fmt: skip


def why_not_by_name(path: str) -> str | None:
    """Return why a file is rejected by its path inside the repository, or `None`.

    >>> why_not_by_name("src/.env"), why_not_by_name("web/jquery.min.js"), why_not_by_name("src/a.c")
    ('hidden file', 'minified or installed file', None)
    """
    parts = path.split("/")
    name = parts[-1]
    if any(part.startswith(".") or ".git" in part for part in parts):
        return "hidden file"
    if "LICENSE" in name.upper():
        return "licence file"
    if ".min." in name or "node_modules" in parts:
        return "minified or installed file"
    if "." in name and name.rpartition(".")[2].lower() in _DATA_ENDINGS:
        return "data by its ending"
    return None


def code_text(content: bytes) -> tuple[str, str | None]:
    """Return the text of a file, and why it is rejected or `None`."""
    if not content.strip():
        return "", "empty file"
    if len(content) > MAX_BYTES:
        return "", "not text" if is_binary(content) else "100000 characters or more"
    try:
        text = decode_text(content)
    except NotTextError as error:
        return "", error.reason
    if len(text) >= MAX_CHARACTERS:
        return text, "100000 characters or more"
    if text.count("\ufffd") * 50 > len(text):
        return text, NotTextError.reason
    if sum(map(text.count, "0123456789")) > MAX_DIGIT_SHARE * len(text):
        return text, "mostly digits"
    if len(text) > MAX_MEAN_LINE * (text.count("\n") + (not text.endswith("\n"))):
        return text, "lines too long on average"
    return text, None


def programming_language(path: str) -> str | None:
    """Return the programming language by the name of the file, or `None`."""
    name = path.rpartition("/")[2].lower()
    return _NAMES.get(name) or (_LANGUAGES.get(name.rpartition(".")[2]) if "." in name else None)

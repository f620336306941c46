"""XML from untrusted files: parse, expand named entities, unescape."""

"""Regular expressions and formats with texts that match them."""

from __future__ import annotations

STRINGS = ("", "a", "ab", "hello", "é", "😀x", 'q"\\', "tab\tnew\nline", "zwölf Boxkämpfer", "12", "null")
PATTERNS: dict[str, tuple[str, ...]] = {
    r"^[a-z]{2,5}$": ("ab", "xyz", "abcde"),
    r"^\d{3}-\d{4}$": ("555-1234",),
    r"[A-Z]": ("A", "xAy", "ÄBC"),
    r"^(red|green|blue)$": ("red", "blue"),
    r'^[^"\\]*$': ("", "a b", "é"),
    r"^a|b$": ("ax", "xb", "ab"),
    r"^\w+@\w+\.com$": ("me@there.com",),
    r"^\$[0-9]+(\.[0-9]{2})?$": ("$5", "$5.25"),
    r"^.{1,4}$": ("a", "😀é", "abcd"),
    r"^(?:[a-f0-9]{2}:){2}[a-f0-9]{2}$": ("00:ff:1a",),
    r"^[à-ü]+$": ("é", "àü"),
    r"^a*b+c?$": ("b", "aabbc"),
    r"^\S+\s\S+$": ("a b", "x\ty"),
    r"\D": ("a", "1a"),
    r"^[^\w]+$": ("-", "?!"),
    r"^$": ("",),
}
FORMATS: dict[str, tuple[str, ...]] = {
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("10:00:00Z", "23:59:59.5+01:00"),
    "date-time": ("2024-02-29T10:00:00Z", "1999-12-31T23:59:59.125-05:30"),
    "duration": ("P1D", "PT1H30M", "P2W"),
    "email": ("a@b.c", "first.last@example.com"),
    "hostname": ("localhost", "a-b.example.com"),
    "ipv4": ("1.2.3.4", "255.0.0.1"),
    "ipv6": ("::1", "1:2:3:4:5:6:7:8", "fe80::1"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "uri": ("https://a.b/c?d#e", "urn:x:y"),
}

"""What this repository takes from others: versions, licences, known vulnerabilities."""

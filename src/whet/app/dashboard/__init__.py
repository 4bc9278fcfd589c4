"""The dashboard: pages about runs in a browser, in one HTML file, and in the terminal."""

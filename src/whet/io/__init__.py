"""File, server, signal and trace formats that every part may use."""

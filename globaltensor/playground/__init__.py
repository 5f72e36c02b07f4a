"""`globaltensor play`: placements, sbps and an expression set in a browser, and what becomes of them as pictures."""

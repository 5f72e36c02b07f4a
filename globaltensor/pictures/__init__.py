"""Pictures of layouts, boxings and timetables: SVG that needs no script, light and dark, and the page of a report."""

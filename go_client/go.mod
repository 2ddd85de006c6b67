module weightbus

go 1.19

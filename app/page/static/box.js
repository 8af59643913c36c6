// The message box: its text when sent, its text while typed, and the focus.

// Not on touch screens, where focus opens the keyboard.
function focusBox() {
  if (matchMedia("(hover: hover)").matches) document.querySelector("#box textarea")?.focus();
}

// The message is the box's text when it is sent, not when Gradio makes its call.
function noteMessage(event) {
  const box = document.querySelector("#box textarea");
  if (box && (event.key === "Enter" ? event.target === box : event.target.closest("#box button"))) {
    const entry = document.querySelector("#entry");
    entry.message = { text: box.value, files: filesOf(entry) };
  }
}
document.addEventListener("keydown", noteMessage, true);
document.addEventListener("click", noteMessage, true);

// Saves typed text at once: Gradio's events do not arrive while the server is down.
document.addEventListener("input", (event) => {
  if (!event.target.matches("#box textarea")) return;
  event.target.dir = "auto";
  try {
    sessionStorage.setItem("typed", event.target.value);
  } catch (error) {
    console.warn(error); // the storage is full
  }
});

// Send and Stop replace each other, which would lose the focus. After New chat the user types next.
document.addEventListener("click", (event) => {
  if (event.target.closest("#box button, #new")) focusBox();
});
